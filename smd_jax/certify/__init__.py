"""Checks whether a recorded rollout was sampled from the policy to be trained, and names the cause if not."""

from smd_jax.certify.record import Record as Record
from smd_jax.certify.record import arrays_of as arrays_of
from smd_jax.certify.record import load_record as load_record
from smd_jax.certify.record import save_record as save_record
from smd_jax.certify.causes import PromptFacts as PromptFacts
from smd_jax.certify.verdict import Models as Models
from smd_jax.certify.verdict import Verdict as Verdict
from smd_jax.certify.verdict import certify as certify
