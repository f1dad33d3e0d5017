"""Controllers of jobs: detached Ray actors, each of which runs one job from its submission to its end."""
