//! The oracle: attention and its gradients in scalar f64, straight from the definition. It knows no plans, tiles or backends, and every
//! kernel is tested against it.

mod backward;
mod forward;

pub use backward::{AttentionGradients, backward};
pub(crate) use forward::for_each_row;
pub use forward::{Attention, attention, for_each_prob};
