//! Progress of long work: a bar on a terminal, nothing in a pipe.

use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// A progress bar on a terminal, nothing in a pipe.
pub(crate) fn progress(length: u64) -> ProgressBar {
    let bar = ProgressBar::new(length);
    match ProgressStyle::with_template("{spinner} {bar:40} {pos}/{len} {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// A progress bar that is drawn at once and again at intervals, for steps that take seconds.
pub(crate) fn ticking(length: u64) -> ProgressBar {
    const INTERVAL: Duration = Duration::from_millis(100);
    let bar = progress(length);
    if !bar.is_hidden() {
        bar.enable_steady_tick(INTERVAL);
    }
    bar
}
