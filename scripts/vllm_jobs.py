"""Run jobs of ``vllm bench serve`` in one process: a list of its flags a line in, its result a line out.

Runs under the Python of the client's own environment (see ``scripts.bench_client``), where importing vLLM takes ten
seconds; so it is imported once for all jobs. Lines that are not results go to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from contextlib import redirect_stdout

from vllm.benchmarks.serve import add_cli_args, main


def run() -> None:
    """Run jobs until there are no more."""
    results = sys.stdout
    with redirect_stdout(sys.stderr):
        parser = argparse.ArgumentParser()
        add_cli_args(parser)
        print(json.dumps({"ready": True}), file=results, flush=True)
        for line in sys.stdin:
            try:
                answer = {"result": main(parser.parse_args(json.loads(line)))}
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=results, flush=True)


run()
