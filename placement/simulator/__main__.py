"""``python -m placement.simulator``: replays traces under several policies and prints the results side by side."""

from placement.simulator.threads import ask_for_one

if __name__ == "__main__":
    ask_for_one()  # before NumPy is imported
    from placement.simulator.cli import main

    raise SystemExit(main())
