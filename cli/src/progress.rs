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

/// Time between two drawings of work that takes seconds a step.
const INTERVAL: Duration = Duration::from_millis(100);

/// A progress bar that is drawn at once and again at intervals, for steps that take seconds.
pub(crate) fn ticking(length: u64) -> ProgressBar {
    drawn_at_intervals(progress(length))
}

/// The time since the beginning and a message, for work whose end is not known.
pub(crate) fn spinner() -> ProgressBar {
    let spinner = ProgressBar::new_spinner();
    drawn_at_intervals(match ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
        Ok(style) => spinner.with_style(style),
        Err(_) => spinner,
    })
}

fn drawn_at_intervals(bar: ProgressBar) -> ProgressBar {
    if !bar.is_hidden() {
        bar.enable_steady_tick(INTERVAL);
    }
    bar
}
