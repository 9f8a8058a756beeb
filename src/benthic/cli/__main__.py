"""`python -m benthic.cli`: the command line where the `benthic` script is not on the path."""

from benthic.cli import main

if __name__ == "__main__":
    main()
