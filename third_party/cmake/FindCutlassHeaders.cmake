# Finds the CUTLASS and CuTe C++ headers that the `nvidia-cutlass` wheel carries, for a build that needs them:
#
#   list(APPEND CMAKE_MODULE_PATH "${CMAKE_SOURCE_DIR}/third_party/cmake")
#   find_package(CutlassHeaders REQUIRED)
#
# Input:   Python_EXECUTABLE, the interpreter whose environment holds the wheel (found when unset)
# Output:  CutlassHeaders_FOUND, CutlassHeaders_INCLUDE_DIR
if(NOT Python_EXECUTABLE)
  find_program(Python_EXECUTABLE NAMES python3 python)
endif()

# The wheel is located, not imported: importing cutlass_library loads its whole kernel generator.
execute_process(
  COMMAND
    "${Python_EXECUTABLE}" -c
    "import importlib.util as u; s = u.find_spec('cutlass_library'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE cutlass_library_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE)

find_path(CutlassHeaders_INCLUDE_DIR cutlass/cutlass.h PATHS "${cutlass_library_dir}/source/include" NO_DEFAULT_PATH)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  CutlassHeaders
  REQUIRED_VARS CutlassHeaders_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "need the nvidia-cutlass wheel in the environment of ${Python_EXECUTABLE}: pip install nvidia-cutlass")
