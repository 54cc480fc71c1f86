# SPDX-License-Identifier: Apache-2.0
"""``python [-u] resiliency/template CHANNEL_FD ROOM``: a template process; `client.Template` starts this."""

import sys

if __name__ == "__main__":
    sys.path[0] = __file__.removesuffix("/resiliency/template/__main__.py")
    from resiliency.template import program, server

    if getattr(sys.flags, "safe_path", False):  # Python 3.11
        del sys.path[0]
    program.run(server.main())
