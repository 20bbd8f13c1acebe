"""Quality of a bundle on a text: perplexity, and KL divergence from a reference; what deferring and skipping cost.

And which experts it uses on one (`ktc profile`: routing.py, expert_use_report.py).

Runs on the native decode graph (ktc.native), so that decoding is measured as it happens: token by token, with
Expert Deferral. Perplexity of any Hugging Face model, without KL, is ktc/engine/perplexity.py.
"""

from ktc.eval.metrics import Score
from ktc.eval.run import Setting, evaluate, settings_of_table

__all__ = ["Score", "Setting", "evaluate", "settings_of_table"]
