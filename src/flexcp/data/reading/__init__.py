"""Reading: samples of a dataset, their masks, the sources that give them in order, and the rows that each rank gets."""
