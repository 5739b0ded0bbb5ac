"""Runs the command line of `jaxsparse.doctor`."""

from jaxsparse.doctor import main

if __name__ == "__main__":
  main()
