"""Losses, advantages and divergences: functions of arrays that know no model, and can be tried on three numbers."""

from smd_jax.losses.policy import LossConfig as LossConfig
from smd_jax.losses.policy import LossInputs as LossInputs
from smd_jax.losses.policy import LossTerms as LossTerms
from smd_jax.losses.policy import policy_loss as policy_loss
from smd_jax.losses.policy import token_weights as token_weights
from smd_jax.losses.policy import k3 as k3
from smd_jax.losses.advantages import group_relative as group_relative
from smd_jax.losses.advantages import groups_with_signal as groups_with_signal
from smd_jax.losses.advantages import leave_one_out as leave_one_out
from smd_jax.losses.returns import gae as gae
from smd_jax.losses.distillation import DistillConfig as DistillConfig
from smd_jax.losses.schedules import CoefSchedule as CoefSchedule
from smd_jax.losses.dpo import DPOConfig as DPOConfig
from smd_jax.losses.dpo import DPOInputs as DPOInputs
from smd_jax.losses.dpo import dpo_loss as dpo_loss
from smd_jax.losses.dpo import pair_weights as pair_weights
from smd_jax.losses.pairs import best_worst as best_worst
from smd_jax.losses.value import ValueConfig as ValueConfig
from smd_jax.losses.value import value_loss as value_loss
