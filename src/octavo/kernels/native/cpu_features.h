// Which instruction sets this processor offers, and the kernels that go with them.
#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"

namespace octavo {

// Names of the paths that can run here, best first; "portable" is always the last.
std::vector<std::string> available_instruction_sets();

// The kernels of one path; an empty name takes the best. Throws std::invalid_argument for a path that cannot
// run here.
const KernelTable& select_kernels(const std::string& instruction_set);

}  // namespace octavo
