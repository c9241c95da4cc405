"""The smallest real kernel and its spec, for tests of the compile layer. Importing it loads nothing heavy."""
