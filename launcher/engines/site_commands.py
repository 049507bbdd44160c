"""Commands of a site's own engine (sbatch, kubectl), asked from here: what they print, or one sentence why not."""

from __future__ import annotations

import subprocess

from hetctl.comm.contract.errors import ConfigError, WorkFailed

ANSWER_S = 60.0


def asked(*argv: str, hint: str, stdin: str = "", seconds: float = ANSWER_S) -> str:
    """What a command prints. Raises ConfigError (with `hint`) where there is none, WorkFailed when it refuses."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=seconds)
    except OSError:
        raise ConfigError(f"there is no {argv[0]} here", hint=hint) from None
    except subprocess.TimeoutExpired:
        raise WorkFailed(f"{argv[0]} did not answer within {seconds:g} s") from None
    if done.returncode:
        raise WorkFailed(f"{argv[0]} refused: {' '.join(done.stderr.split())[:400]}")
    return done.stdout
