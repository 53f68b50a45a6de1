"""Run the ``flexcp`` command as ``python -m flexcp``, which ``torchrun ... -m flexcp bench step`` needs."""

from flexcp.cli.main import run

if __name__ == "__main__":
    run()
