"""`--external_plugins` of GRPO: applies our fixes of ms-swift and registers the scheduler and the reward.

ms-swift loads this file under another name with its folder first on the path, so it only imports the real modules.
"""

from swift.rewards import orms
from swift.rollout.multi_turn import multi_turns

from training import patches
from training.arguments import REWARD, SCHEDULER
from training.rewards import AgentVerifier
from training.scheduler import AgentSandbox

patches.apply()
multi_turns[SCHEDULER] = AgentSandbox
orms[REWARD] = AgentVerifier
