"""Become another program that ends with its parent: ``exec_with_parent.py NICENESS PROGRAM [ARGUMENT …]``.

Owns what must happen between fork and exec: a process group of its own, so that Ctrl-C in the terminal reaches only
the supervisor; the niceness; and the kernel's promise of SIGTERM when the supervisor dies. It is run as a file and
imports only the standard library, because it runs before every process of ``octavo up``.

A process group and not a session: Linux may schedule each session as one unit (sched_autogroup), and then the
niceness of a process means nothing outside of its session.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_SUPERVISED_VARIABLE = "OCTAVO_SUPERVISOR_PID"


def main() -> None:
    """Prepare this process and replace it."""
    niceness, *command = sys.argv[1:]
    os.setpgid(0, 0)
    os.nice(int(niceness))
    if sys.platform.startswith("linux"):
        # The kernel keeps this over exec.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(os.environ[_SUPERVISED_VARIABLE]):
        # The supervisor died before the promise was in place.
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}.")


if __name__ == "__main__":
    main()
