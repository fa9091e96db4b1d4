"""Languages that an output can be held to, and the compiler that makes them masks of tokens."""

from libs.grammar.compiler import CompiledGrammar, GrammarCompiler
from libs.grammar.grammar import Grammar, GrammarForm, check_grammar

__all__ = ["CompiledGrammar", "Grammar", "GrammarCompiler", "GrammarForm", "check_grammar"]
