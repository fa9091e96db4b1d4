"""Configuration of a tier: one frozen dataclass, filled in layers.

Owns the order of the layers (defaults, ``octavo.toml``, environment, flags), the conversion of text to
types and the refusal of unknown keys. It must not know any tier.
"""

from libs.config.loader import ConfigError, load, setting

__all__ = ["ConfigError", "load", "setting"]
