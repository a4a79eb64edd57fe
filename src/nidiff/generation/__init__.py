"""From seeds to files: sampling jobs, the folders they fill, tiles of fixed size."""
