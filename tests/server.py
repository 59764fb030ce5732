from helpers.servers import *   # noqa
