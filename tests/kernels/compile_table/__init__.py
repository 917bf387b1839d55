"""Proof without the cards that all kernels fit them: a table of what each variant takes on each architecture.

`launches` says which variants engines' starts and training jobs launch, `variants` compiles them, `table` keeps the
lines in the folder ``compiled``; `__main__` is the command.
"""
