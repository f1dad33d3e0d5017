"""Job controllers: detached Ray actors, each running one job from submission until it ends."""
