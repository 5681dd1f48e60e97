// Where the user watches a run.
#pragma once

namespace shoal {

/// Columns of the terminal that shows this process's stdout; 0 when it goes to a file or a pipe, or when the
/// terminal cannot erase a line (TERM unset or dumb). Under mpirun, which gives its ranks a pseudo terminal
/// in any case, the terminal of mpirun; 0 on hosts that mpirun does not run on, and under srun.
int terminal_columns();

}  // namespace shoal
