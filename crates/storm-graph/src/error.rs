use std::fmt;

/// Why a graph could not be built or transformed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GraphError {
    /// An op rejected its operands.
    #[error("{op} `{name}`: {problem}{operands}")]
    Operands {
        /// The op's name.
        op: &'static str,
        /// The name given to the node.
        name: String,
        /// The problem, and what was expected.
        problem: String,
        /// The operands.
        operands: OperandList,
    },
    /// A gradient is needed through an op that has none.
    #[error(
        "{op} `{name}` cannot be differentiated: gradients of `{wanted}` were asked for through it; \
         mark the parameters before it as frozen, or leave the op out of the differentiated graph"
    )]
    NotDifferentiable {
        /// The op's name.
        op: &'static str,
        /// The name given to the node.
        name: String,
        /// The operand that needs a gradient.
        wanted: String,
    },
    /// The sections of a program do not match.
    #[error("section `{section}`: {problem}")]
    Section {
        /// The section's name.
        section: String,
        /// The problem.
        problem: String,
    },
}

/// A list of operands for an error message.
#[derive(Clone, Debug, PartialEq)]
pub struct OperandList(pub(crate) Vec<(&'static str, String)>);

impl fmt::Display for OperandList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (role, tensor)) in self.0.iter().enumerate() {
            f.write_str(if i == 0 { "\n  given: " } else { "\n         " })?;
            write!(f, "{role} = {tensor}")?;
        }
        Ok(())
    }
}
