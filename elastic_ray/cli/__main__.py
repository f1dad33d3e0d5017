"""``python -m elastic_ray.cli``, for use if the installed command is not on the path."""

from elastic_ray.cli.app import main

if __name__ == "__main__":
    main()
