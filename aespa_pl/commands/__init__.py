"""Run each command once its arguments are parsed."""
