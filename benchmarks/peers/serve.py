"""What a peer speaks: one JSON object a line in, one a line out. Standard library only: every environment runs it."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def serve(calls: Mapping[str, Callable[..., Any]]) -> None:
    """Answer `{"call": name, argument: value, …}` until the input ends.

    A reply is `{"result": …, "seconds": spent in the call}` or `{"error": a traceback}`. What the libraries print goes
    to the error stream.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        began = time.perf_counter()
        try:
            result = calls[arguments.pop("call")](**arguments)
            reply = {"result": result, "seconds": time.perf_counter() - began}
        except Exception:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
