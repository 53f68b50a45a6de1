"""The strategy ``blocks``: row ranges of documents are packed onto ranks, with compiled loops."""
