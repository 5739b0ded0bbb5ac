"""Runs the command line of `jaxsparse.launch`."""

from jaxsparse.launch import main

if __name__ == "__main__":
  main()
