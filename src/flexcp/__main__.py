"""``python -m flexcp`` is the command ``flexcp``, as ``torchrun ... -m flexcp bench step`` needs it."""

from flexcp.cli.main import run

if __name__ == "__main__":
    run()
