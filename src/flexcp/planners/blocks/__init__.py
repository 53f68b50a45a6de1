"""The strategy ``blocks``: rows of documents packed onto ranks, with its compiled loops."""
