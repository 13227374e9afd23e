//! Time that work takes on a device.

/// Seconds that runs of the same work took on a device, ascending.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    seconds: Vec<f64>,
}

impl Timing {
    pub(crate) fn new(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        Self { seconds }
    }

    /// Seconds of each run, ascending.
    #[must_use]
    pub fn seconds(&self) -> &[f64] {
        &self.seconds
    }

    /// Seconds of the fastest run; infinite where there are no runs.
    #[must_use]
    pub fn least(&self) -> f64 {
        self.seconds.first().copied().unwrap_or(f64::INFINITY)
    }

    /// The median in seconds; infinite where there are no runs.
    #[must_use]
    pub fn median(&self) -> f64 {
        let n = self.seconds.len();
        match n {
            0 => f64::INFINITY,
            _ => (self.seconds[(n - 1) / 2] + self.seconds[n / 2]) / 2.0,
        }
    }

    /// The interquartile range as a fraction of the median; 0 where there are no runs.
    #[must_use]
    pub fn spread(&self) -> f64 {
        let n = self.seconds.len();
        match n {
            0 => 0.0,
            _ => (self.seconds[(3 * n / 4).min(n - 1)] - self.seconds[n / 4]) / self.median(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_in_the_middle() {
        let of = |seconds: &[f64]| Timing::new(seconds.to_vec());
        assert_eq!(of(&[3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(of(&[4.0, 1.0, 2.0, 8.0]).median(), 3.0);
        assert_eq!(of(&[5.0]).median(), 5.0);
        assert_eq!(of(&[]).median(), f64::INFINITY);
        assert_eq!(of(&[2.0, 1.0, 3.0]).least(), 1.0);
        assert_eq!(of(&[5.0]).spread(), 0.0);
        assert_eq!(of(&[1.0, 2.0, 3.0, 4.0]).spread(), 2.0 / 2.5);
    }
}
