"""`python -m benthic`: the command line."""

from benthic.cli import main

if __name__ == "__main__":
    main()
