"""One file per command of ``nidiff``. Importing one must stay quick: ``run`` imports what it needs."""
