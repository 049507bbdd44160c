"""`python -m hetctl`: the same face as the `hetctl` command, for hosts where only the tree is there."""

from hetctl.app import main

if __name__ == "__main__":
    main()
