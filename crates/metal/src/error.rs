//! Why the backend refuses or fails.

use flashtile_gpu::SessionError;
use flashtile_kernel::metal::Error;

/// Why the Metal backend refuses or fails.
pub type MetalError = SessionError<Error>;
