// In place of the header that CUTLASS's example 41 includes for dropout, which no kernel here has: cuRAND is not among the
// packages that kernels are built with.
#pragma once
