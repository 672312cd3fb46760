"""The measured study: its plan of runs, the tables and figures' numbers they give, the paper's."""
