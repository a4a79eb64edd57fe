"""The page of ``nidiff explore``: one file per tab. It needs the extra ``app``."""
