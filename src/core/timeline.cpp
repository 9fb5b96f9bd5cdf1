#include "flashoverlap/timeline.h"
