// The class Training of the extension module: the fused passes of a training step on arrays of
// torch. Shapes and types are checked here, because a kernel would touch foreign memory.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <initializer_list>
#include <optional>
#include <stdexcept>

#include "runtime/levels.h"

namespace nb = nanobind;

namespace everstream {
namespace {

using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void expect(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

bool is_bfloat16(const Array& array) {
    const auto type = array.dtype();
    expect(type.lanes == 1, "an array of vectors");
    if (type == nb::dtype<float>()) return false;
    expect(
        type.code == uint8_t(nb::dlpack::dtype_code::Bfloat) && type.bits == 16,
        "activations must be float32 or bfloat16");
    return true;
}

template <class A>
int64_t extent(const A& array, int axis) {
    expect(size_t(axis) < array.ndim(), "an array has too few axes");
    return int64_t(array.shape(size_t(axis)));
}
template <class A>
int64_t last(const A& array) {
    return extent(array, int(array.ndim()) - 1);
}

// All of one type, which decides the table of kernels.
bool same_type(std::initializer_list<const Array*> arrays) {
    const bool low = is_bfloat16(**arrays.begin());
    for (const Array* array : arrays) expect(is_bfloat16(*array) == low, "activations differ in type");
    return low;
}
template <class A>
void sized(const A& array, int64_t size) {
    expect(int64_t(array.size()) == size, "an array has another size than its inputs say");
}

class Training {
  public:
    explicit Training(const std::string& level) : kernels_(training_of(level)) {}

    void norm(
        const Floats& x, const std::optional<Array>& y, const Floats& weight, float epsilon,
        const std::optional<Floats>& sum, const Array& out) const {
        const int64_t width = extent(weight, 0), size = int64_t(x.size());
        expect(last(x) == width, "norm: x and weight differ in width");
        sized(out, size);
        expect(bool(y) == bool(sum), "norm: a sum has two terms");
        bool low = is_bfloat16(out);
        if (y) sized(*y, size), sized(*sum, size), low = same_type({&*y, &out});
        const NormArguments a{
            size / width, int(width), epsilon, x.data(), weight.data(), y ? y->data() : nullptr,
            sum ? sum->data() : nullptr, out.data()};
        const nb::gil_scoped_release released;
        kernels_[low].norm(a);
    }

    void norm_backward(
        const Floats& sum, const Floats& weight, float epsilon, const Array& grad_out,
        const std::optional<Floats>& grad_sum, const Floats& grad_x,
        const std::optional<Array>& grad_y, const Floats& grad_weight) const {
        const int64_t width = extent(weight, 0), size = int64_t(sum.size());
        expect(last(sum) == width, "norm_backward: x and weight differ in width");
        sized(grad_out, size), sized(grad_x, size), sized(grad_weight, width);
        if (grad_sum) sized(*grad_sum, size);
        bool low = is_bfloat16(grad_out);
        if (grad_y) sized(*grad_y, size), low = same_type({&grad_out, &*grad_y});
        const NormGradients a{
            size / width, int(width), epsilon, sum.data(), weight.data(), grad_out.data(),
            grad_sum ? grad_sum->data() : nullptr, grad_x.data(),
            grad_y ? grad_y->data() : nullptr, grad_weight.data()};
        const nb::gil_scoped_release released;
        kernels_[low].norm_backward(a);
    }

    void gated_norm(
        const Array& x, const Floats& weight, const Array& gate, float epsilon, const Array& out) const {
        const int64_t width = extent(weight, 0), size = int64_t(x.size());
        expect(last(x) == width, "gated_norm: x and weight differ in width");
        sized(gate, size), sized(out, size);
        GatedNormArguments a{};
        a.rows = size / width, a.width = int(width), a.epsilon = epsilon;
        a.x = x.data(), a.weight = weight.data(), a.gate = gate.data(), a.out = out.data();
        const bool low = same_type({&x, &gate, &out});
        const nb::gil_scoped_release released;
        kernels_[low].gated_norm(a);
    }

    void gated_norm_backward(
        const Array& x, const Floats& weight, const Array& gate, float epsilon,
        const Array& grad_out, const Array& grad_x, const Array& grad_gate,
        const Floats& grad_weight) const {
        const int64_t width = extent(weight, 0), size = int64_t(x.size());
        expect(last(x) == width, "gated_norm_backward: x and weight differ in width");
        for (const Array* array : {&gate, &grad_out, &grad_x, &grad_gate}) sized(*array, size);
        sized(grad_weight, width);
        GatedNormArguments a{};
        a.rows = size / width, a.width = int(width), a.epsilon = epsilon;
        a.x = x.data(), a.weight = weight.data(), a.gate = gate.data();
        a.grad_out = grad_out.data(), a.grad_x = grad_x.data(), a.grad_gate = grad_gate.data();
        a.grad_weight = grad_weight.data();
        const bool low = same_type({&x, &gate, &grad_out, &grad_x, &grad_gate});
        const nb::gil_scoped_release released;
        kernels_[low].gated_norm_backward(a);
    }

    void swiglu(const Array& up, const Array& out) const {
        const int64_t width = last(out);
        expect(last(up) == 2 * width, "swiglu: up is not twice as wide as the result");
        sized(up, 2 * int64_t(out.size()));
        SwiGLUArguments a{};
        a.rows = int64_t(out.size()) / width, a.width = int(width);
        a.up = up.data(), a.out = out.data();
        const bool low = same_type({&up, &out});
        const nb::gil_scoped_release released;
        kernels_[low].swiglu(a);
    }

    void swiglu_backward(const Array& up, const Array& grad_out, const Array& grad_up) const {
        const int64_t width = last(grad_out);
        expect(last(up) == 2 * width, "swiglu_backward: up is not twice as wide as the result");
        sized(up, 2 * int64_t(grad_out.size())), sized(grad_up, int64_t(up.size()));
        SwiGLUArguments a{};
        a.rows = int64_t(grad_out.size()) / width, a.width = int(width);
        a.up = up.data(), a.grad_out = grad_out.data(), a.grad_up = grad_up.data();
        const bool low = same_type({&up, &grad_out, &grad_up});
        const nb::gil_scoped_release released;
        kernels_[low].swiglu_backward(a);
    }

    void convolution(
        const Array& x, const Floats& weight, const Floats& state, int unit, int head, float scale,
        float epsilon, const Array& out) const {
        ConvolutionArguments a = convolution_of(x, weight, state, unit, head, scale, epsilon);
        sized(out, int64_t(x.size()));
        a.out = out.data();
        const bool low = same_type({&x, &out});
        const nb::gil_scoped_release released;
        kernels_[low].convolution(a);
    }

    void convolution_backward(
        const Array& x, const Floats& weight, const Floats& state, int unit, int head, float scale,
        float epsilon, const Array& grad_out, const Array& grad_x, const Floats& grad_weight,
        const Floats& grad_state) const {
        ConvolutionArguments a = convolution_of(x, weight, state, unit, head, scale, epsilon);
        sized(grad_out, int64_t(x.size())), sized(grad_x, int64_t(x.size()));
        sized(grad_weight, int64_t(weight.size())), sized(grad_state, int64_t(state.size()));
        a.grad_out = grad_out.data(), a.grad_x = grad_x.data();
        a.grad_weight = grad_weight.data(), a.grad_state = grad_state.data();
        const bool low = same_type({&x, &grad_out, &grad_x});
        const nb::gil_scoped_release released;
        kernels_[low].convolution_backward(a);
    }

    void delta(
        const Array& qkv, const Floats& beta, const Floats& log_decay, const Floats& state,
        const Array& out, const Array& u, const Floats& starts, const Floats& new_state) const {
        DeltaArguments a = delta_of(qkv, beta, log_decay, state, u, starts);
        sized(out, int64_t(u.size())), sized(new_state, int64_t(state.size()));
        a.out = out.data(), a.new_state = new_state.data();
        const bool low = same_type({&qkv, &out, &u});
        const nb::gil_scoped_release released;
        kernels_[low].delta(a);
    }

    void delta_backward(
        const Array& qkv, const Floats& beta, const Floats& log_decay, const Floats& state,
        const Array& u, const Floats& starts, const Array& grad_out,
        const std::optional<Floats>& grad_new_state, const Array& grad_qkv,
        const Floats& grad_beta, const Floats& grad_log_decay, const Floats& grad_state) const {
        DeltaArguments a = delta_of(qkv, beta, log_decay, state, u, starts);
        sized(grad_out, int64_t(u.size())), sized(grad_qkv, int64_t(qkv.size()));
        sized(grad_beta, int64_t(beta.size())), sized(grad_log_decay, int64_t(beta.size()));
        sized(grad_state, int64_t(state.size()));
        if (grad_new_state) sized(*grad_new_state, int64_t(state.size()));
        a.grad_out = grad_out.data(), a.grad_qkv = grad_qkv.data();
        a.grad_new_state = grad_new_state ? grad_new_state->data() : nullptr;
        a.grad_beta = grad_beta.data(), a.grad_log_decay = grad_log_decay.data();
        a.grad_state = grad_state.data();
        const bool low = same_type({&qkv, &u, &grad_out, &grad_qkv});
        const nb::gil_scoped_release released;
        kernels_[low].delta_backward(a);
    }

    double cross_entropy(const Array& logits, const Indices& targets) const {
        const int64_t width = last(logits);
        sized(logits, width * int64_t(targets.size()));
        for (size_t i = 0; i < targets.size(); i++)
            expect(targets.data()[i] >= 0 && targets.data()[i] < width, "a target is no column");
        const bool low = is_bfloat16(logits);
        const nb::gil_scoped_release released;
        return kernels_[low].cross_entropy(
            int64_t(targets.size()), int(width), targets.data(), logits.data());
    }

  private:
    static ConvolutionArguments convolution_of(
        const Array& x, const Floats& weight, const Floats& state, int unit, int head, float scale,
        float epsilon) {
        ConvolutionArguments a{};
        expect(x.ndim() == 3 && weight.ndim() == 2, "convolution: x has 3 axes, weight has 2");
        a.batch = int(extent(x, 0)), a.tokens = int(extent(x, 1)), a.width = int(extent(x, 2));
        a.size = int(extent(weight, 1)), a.unit = unit, a.head = head;
        expect(extent(weight, 0) == a.width && a.size > 0, "convolution: x and weight differ in width");
        sized(state, int64_t(a.batch) * (a.size - 1) * a.width);
        expect(
            head > 0 && unit >= 0 && unit % head == 0 && 2 * unit <= a.width,
            "convolution: the heads do not fit");
        a.scale = scale, a.epsilon = epsilon;
        a.x = x.data(), a.weight = weight.data(), a.state = state.data();
        return a;
    }

    static DeltaArguments delta_of(
        const Array& qkv, const Floats& beta, const Floats& log_decay, const Floats& state,
        const Array& u, const Floats& starts) {
        DeltaArguments a{};
        expect(state.ndim() == 4 && qkv.ndim() == 3, "delta: state has 4 axes, qkv has 3");
        a.batch = int(extent(state, 0)), a.heads = int(extent(state, 1));
        a.key = int(extent(state, 2)), a.value = int(extent(state, 3)), a.tokens = int(extent(qkv, 1));
        const int64_t tokens = int64_t(a.batch) * a.tokens;
        sized(qkv, tokens * a.heads * (2 * a.key + a.value));
        sized(beta, tokens * a.heads), sized(log_decay, tokens * a.heads);
        sized(u, tokens * a.heads * a.value);
        sized(starts, int64_t(state.size()) * ((a.tokens + DELTA_BLOCK - 1) / DELTA_BLOCK));
        a.qkv = qkv.data(), a.beta = beta.data(), a.log_decay = log_decay.data();
        a.state = state.data(), a.u = u.data(), a.starts = starts.data();
        return a;
    }

    const TrainingKernels* kernels_;
};

}  // namespace

void bind_training(nb::module_& m) {
    nb::class_<Training>(m, "Training")
        .def(nb::init<const std::string&>(), nb::arg("level") = "")
        .def(
            "norm", &Training::norm, nb::arg("x"), nb::arg("y").none(), nb::arg("weight"),
            nb::arg("epsilon"), nb::arg("sum").none(), nb::arg("out"))
        .def(
            "norm_backward", &Training::norm_backward, nb::arg("sum"), nb::arg("weight"),
            nb::arg("epsilon"), nb::arg("grad_out"), nb::arg("grad_sum").none(), nb::arg("grad_x"),
            nb::arg("grad_y").none(), nb::arg("grad_weight"))
        .def("gated_norm", &Training::gated_norm)
        .def("gated_norm_backward", &Training::gated_norm_backward)
        .def("swiglu", &Training::swiglu)
        .def("swiglu_backward", &Training::swiglu_backward)
        .def("convolution", &Training::convolution)
        .def("convolution_backward", &Training::convolution_backward)
        .def("delta", &Training::delta)
        .def(
            "delta_backward", &Training::delta_backward, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
            nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
            nb::arg())
        .def("cross_entropy", &Training::cross_entropy);
}

}  // namespace everstream
