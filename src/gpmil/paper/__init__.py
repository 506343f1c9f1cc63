"""The experiments of the paper: one module per table or figure, beside the paper's own numbers.

cohorts     the data: simulated, or the user's
methods     the models that are compared, with their settings
study       fit each of them several times, predict the test slides, keep what was found
table1_...  figure1_...     one module per result, numbered as in the paper
findings    what the paper concludes, checked on these data
reported    the paper's numbers (reported.toml)
page        all of it on one page
"""
