"""``toc`` as a script finds it on PATH: has the process that forks run the command (``forks.put_on_path``).

It imports little, as its start is what it saves.
"""

import json
import os
import socket
import sys

place, *words = sys.argv[1:]
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
    line.connect(f"\0{place}")
    job = {"words": words, "cwd": os.getcwd(), "env": dict(os.environ)}  # noqa: PTH109 - pathlib is a slow start
    socket.send_fds(line, [json.dumps(job).encode()], [0, 1, 2])
    code = int(line.recv(20))
sys.exit(code if code >= 0 else 128 - code)
