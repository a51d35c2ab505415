//! Metrics as text for Prometheus, in the format of `OpenMetrics` 1.0.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text as format,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

/// Labels with their values.
pub type Labels = Vec<(&'static str, String)>;

/// One value with its labels.
pub type Sample = (Labels, f64);

/// A metric with all its samples.
#[derive(Debug, Clone)]
pub struct Family {
    name: &'static str,
    help: &'static str,
    samples: Samples,
}

#[derive(Debug, Clone)]
enum Samples {
    Gauge(Vec<Sample>),
    Counter(Vec<Sample>),
    Histogram(Vec<Histogram>),
}

/// How often a value was at most a bound, and no smaller one; and the sum of the values.
#[derive(Debug, Clone)]
pub struct Histogram {
    pub labels: Labels,
    /// The last bound is infinity.
    pub buckets: Vec<(f64, u64)>,
    pub sum: f64,
}

#[must_use]
pub fn gauge(name: &'static str, help: &'static str, samples: Vec<Sample>) -> Family {
    let samples = Samples::Gauge(samples);
    Family {
        name,
        help,
        samples,
    }
}

#[must_use]
pub fn counter(name: &'static str, help: &'static str, samples: Vec<Sample>) -> Family {
    let samples = Samples::Counter(samples);
    Family {
        name,
        help,
        samples,
    }
}

#[must_use]
pub fn histogram(name: &'static str, help: &'static str, samples: Vec<Histogram>) -> Family {
    let samples = Samples::Histogram(samples);
    Family {
        name,
        help,
        samples,
    }
}

impl Family {
    /// With more labels on each sample, by the sample's own; a histogram stays.
    #[must_use]
    pub fn with_labels(mut self, more: impl Fn(&Labels) -> Labels) -> Self {
        if let Samples::Gauge(samples) | Samples::Counter(samples) = &mut self.samples {
            for (labels, _) in samples {
                labels.extend(more(labels));
            }
        }
        self
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (kind, count) = match &self.samples {
            Samples::Gauge(samples) => (MetricType::Gauge, samples.len()),
            Samples::Counter(samples) => (MetricType::Counter, samples.len()),
            Samples::Histogram(samples) => (MetricType::Histogram, samples.len()),
        };
        if count == 0 {
            return Ok(());
        }
        let mut family = encoder.encode_descriptor(self.name, self.help, None, kind)?;
        match &self.samples {
            Samples::Gauge(samples) => each(samples, ConstGauge::new, family),
            Samples::Counter(samples) => each(samples, ConstCounter::new, family),
            Samples::Histogram(samples) => samples.iter().try_for_each(|one| {
                let count = one.buckets.iter().map(|(_, count)| count).sum();
                family
                    .encode_family(&one.labels)?
                    .encode_histogram::<NoLabelSet>(one.sum, count, &one.buckets, None)
            }),
        }
    }
}

fn each<M: EncodeMetric>(
    samples: &[Sample],
    metric: impl Fn(f64) -> M,
    mut family: MetricEncoder<'_>,
) -> fmt::Result {
    for (labels, value) in samples {
        // A family without labels has one sample; the library would write empty braces.
        if labels.is_empty() {
            return metric(*value).encode(family);
        }
        metric(*value).encode(family.encode_family(labels)?)?;
    }
    Ok(())
}

#[derive(Debug, Clone)]
struct All(Vec<Family>);

impl Collector for All {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut families = self.0.iter();
        families.try_for_each(|family| family.encode(&mut encoder))
    }
}

/// The text of metrics whose names begin with `prefix`; those without a sample are left out.
#[must_use]
pub fn text(prefix: &str, families: Vec<Family>) -> String {
    let mut registry = Registry::with_prefix(prefix);
    registry.register_collector(Box::new(All(families)));
    let mut text = String::new();
    // A `String` takes all that is written to it.
    let _ = format::encode(&mut text, &registry);
    text
}

/// Exact up to 2^53.
#[must_use]
#[expect(
    clippy::cast_precision_loss,
    reason = "a metric is a floating-point number"
)]
pub fn number(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_the_text_of_the_format() {
        let labels = || vec![("pod", "a\"\\\n".to_owned()), ("x", String::new())];
        let families = vec![
            gauge("late_seconds", "Age", vec![(Vec::new(), 0.5)]),
            counter("claims", "Claims", vec![(labels(), number(3))]),
            gauge("empty", "Nothing", Vec::new()),
            histogram(
                "call_seconds",
                "Duration",
                vec![Histogram {
                    labels: vec![("program", "p".to_owned())],
                    buckets: vec![(0.1, 2), (1.0, 0), (f64::INFINITY, 1)],
                    sum: 7.25,
                }],
            ),
        ];
        let expected = r#"# HELP t_late_seconds Age
# TYPE t_late_seconds gauge
t_late_seconds 0.5
# HELP t_claims Claims
# TYPE t_claims counter
t_claims_total{pod="a\"\\\n",x=""} 3.0
# HELP t_call_seconds Duration
# TYPE t_call_seconds histogram
t_call_seconds_sum{program="p"} 7.25
t_call_seconds_count{program="p"} 3
t_call_seconds_bucket{le="0.1",program="p"} 2
t_call_seconds_bucket{le="1.0",program="p"} 2
t_call_seconds_bucket{le="+Inf",program="p"} 3
# EOF
"#;
        assert_eq!(text("t", families), expected);
    }
}
