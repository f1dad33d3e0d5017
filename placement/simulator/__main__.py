"""``python -m placement.simulator``: replay traces under policies and print them side by side."""

from placement.simulator.threads import ask_for_one

if __name__ == "__main__":
    ask_for_one()  # before NumPy is imported
    from placement.simulator.cli import main

    raise SystemExit(main())
