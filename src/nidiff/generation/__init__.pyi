from .reconstruct import restore as restore
from .restoration import Restoration as Restoration
