"""Looks at programs as they are compiled, for a GPU that need not be there: tools.program."""
