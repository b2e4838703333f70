//! Storage formats of the optimizer's moments, with conversion.

use crate::Precision;
use storm_graph::{
    DType, MOMENT_GROUP, MOMENT_GROUP_BYTES, MomentFormat, ParameterInstance, ParameterRows,
    ProgramParameter, Training, decode_first_moment, decode_second_moment, encode_first_moment,
    encode_second_moment, moment_scale,
};

/// Storage of the optimizer's moments. Part of the semantics of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moments {
    /// In the type of [`Precision`]: bf16 or f32.
    #[default]
    Full,
    /// In 8 bits for the parameters that tolerate it, see [`Moments::format`].
    Int8,
}

impl Moments {
    /// The format of a parameter's moments. Only those of bf16 matrices use 8 bits. Embeddings and heads do not,
    /// because most of their rows have no gradient in a step. Vectors do not, because they are small. Parameters in
    /// f32, such as adapters, do not, because they are few and f32 was requested.
    pub fn format(self, precision: Precision, parameter: &ProgramParameter) -> MomentFormat {
        let fits = parameter.dtype == DType::BF16
            && parameter.shape.rank() >= 2
            && parameter.rows == ParameterRows::Other;
        match self {
            Moments::Int8 if fits => MomentFormat::Int8,
            _ => MomentFormat::Elements(precision.of_parameter(parameter.dtype).moments()),
        }
    }

    /// Why a model cannot be trained with these moments; `None` if it can.
    pub(crate) fn problem(
        self,
        precision: Precision,
        instances: &[ParameterInstance],
    ) -> Option<&'static str> {
        let mut learns = instances
            .iter()
            .map(|instance| &instance.parameter)
            .filter(|parameter| parameter.training == Training::Trainable);
        let any = learns.any(|parameter| self.format(precision, parameter) == MomentFormat::Int8);
        (self == Moments::Int8 && !any).then_some(
            "int8 is for bf16 matrices other than embeddings and heads, and none of those is trained; leave it out",
        )
    }
}

/// First or second moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    First,
    Second,
}

impl Moment {
    /// Parses a name like `layers.0.mlp.down.weight.first_moment` into the moment and the parameter.
    pub(crate) fn of_name(name: &str) -> Option<(Moment, &str)> {
        let first = name.strip_suffix(".first_moment").map(|name| (Moment::First, name));
        first.or_else(|| name.strip_suffix(".second_moment").map(|name| (Moment::Second, name)))
    }

    /// Decodes a moment from 8 bits.
    pub(crate) fn decode(self, bytes: &[u8], elements: usize) -> Vec<f32> {
        let mut values = Vec::with_capacity(elements);
        for group in bytes.chunks_exact(MOMENT_GROUP_BYTES) {
            let scale = moment_scale(group);
            let count = MOMENT_GROUP.min(elements - values.len());
            values.extend(group[..count].iter().map(|&code| match self {
                Moment::First => decode_first_moment(code, scale),
                Moment::Second => decode_second_moment(code, scale),
            }));
        }
        values
    }

    /// Encodes values in 8 bits, rounding to nearest.
    pub(crate) fn encode(self, values: &[f32]) -> Vec<u8> {
        const NEAREST: u16 = 1 << 15;
        let mut bytes = Vec::new();
        for group in values.chunks(MOMENT_GROUP) {
            let scale = group.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
            let codes = group.iter().map(|&value| match self {
                Moment::First => encode_first_moment(value, scale, NEAREST),
                Moment::Second => encode_second_moment(value.max(0.0), scale, NEAREST),
            });
            bytes.extend(codes.chain(std::iter::repeat(0)).take(MOMENT_GROUP));
            bytes.extend(scale.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        // Every group has the largest level, so that its scale is 3.
        let code =
            |i: usize| if i.is_multiple_of(MOMENT_GROUP) { 255 } else { (i * 7 % 256) as u8 };
        let levels: Vec<f32> = (0..300).map(|i| decode_second_moment(code(i), 3.0)).collect();
        for moment in [Moment::First, Moment::Second] {
            // The second time, values are levels already.
            let once = moment.decode(&moment.encode(&levels), levels.len());
            let twice = moment.decode(&moment.encode(&once), once.len());
            assert_eq!(once, twice);
            assert_eq!(moment.encode(&levels).len(), 3 * MOMENT_GROUP_BYTES);
        }
        let back = Moment::Second.decode(&Moment::Second.encode(&levels), levels.len());
        assert_eq!(back, levels);
    }

    #[test]
    fn moments_are_known_by_their_names() {
        assert_eq!(Moment::of_name("a.b.first_moment"), Some((Moment::First, "a.b")));
        assert_eq!(Moment::of_name("a.second_moment"), Some((Moment::Second, "a")));
        assert_eq!(Moment::of_name("a.master"), None);
    }
}
