"""``octavo up``: every tier as a process of its own on this machine, supervised.

Owns which processes there are, their addresses, their order, restarts, logs and end. It must not know what a tier
does: it meets tiers only through their command line, their health and their exit codes.
"""

import os

# gRPC reads this once, when it is imported. With fork support it would complain on stderr at each process that we
# start while a health check is under way; our children replace themselves at once and need none.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
