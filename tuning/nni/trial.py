"""SHELL: NNI's trial command, which connects a trial to the experiment's process and ends with the trial.

Runs as ``exec python -m tuning.nni.trial``. It imports nothing slow: the process that runs
:class:`tuning.nni.Experiment` holds the trial's job. NNI stops a trial with SIGINT, and shows it as EARLY_STOPPED only
if the command dies from that signal; the experiment's process notices that the connection is broken.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from tuning.nni.wire import ADDRESS, SENT


def main() -> int:
    """Wait until this command's trial has ended; return 0, or 1 if it failed (the reason is printed)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    address = os.environ.get(ADDRESS)
    if not address:
        print(f"{ADDRESS} is not set: start the experiment with tuning.nni.Experiment", file=sys.stderr)
        return 1
    trial = {name: os.environ.get(variable, "") for name, variable in SENT.items()}
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(address)
            connection.sendall(json.dumps(trial).encode() + b"\n")
            answer = connection.makefile().readline()
        except OSError as error:
            answer, reason = "", f": {error}"
        else:
            reason = ""
    if not answer:
        print(f"the process that ran this experiment is gone{reason}", file=sys.stderr)
        return 1
    code, message = json.loads(answer)
    if message:
        print(message, file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
