"""Environments: the other side of a conversation with the policy, such as tools and graders.

`Environment` is the protocol: `reset(row) -> text` and `step(text) -> (text, reward, done)`.
"""

from smd_jax.environments.protocol import Environment as Environment
from smd_jax.environments.protocol import Answer as Answer
from smd_jax.environments.protocol import Failure as Failure
from smd_jax.environments.protocol import Opening as Opening
from smd_jax.environments.processes import Environments as Environments
from smd_jax.environments.processes import open_environments as open_environments
from smd_jax.environments.processes import UnloadableEnvironmentError as UnloadableEnvironmentError
from smd_jax.environments.dialogue import Dialogue as Dialogue
from smd_jax.environments.tools import ToolEnvironment as ToolEnvironment
from smd_jax.environments.tools import ToolCallError as ToolCallError
from smd_jax.environments.respondent import EnvironmentRespondent as EnvironmentRespondent
from smd_jax.environments.respondent import Conversation as Conversation
from smd_jax.environments.retry import RetryEnvironment as RetryEnvironment
