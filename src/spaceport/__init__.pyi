from spaceport.runtime import *  # noqa: F403
from spaceport.tools.exporting import export as export
from spaceport.training.settings import TrainingSettings as TrainingSettings
from spaceport.training.tuning import tune as tune

__version__: str
