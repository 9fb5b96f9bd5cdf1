# Finds OpenBLAS and defines the imported target OpenBLAS::OpenBLAS, which the config files of Debian and others do not.
#
# Installed next to flashoverlap's own package config, so that it also serves users of a static flashoverlap.
# The pthread build is preferred: the OpenMP build keeps a thread count for each thread that calls it, which our own threads
# would have to set one by one.

find_path(
  OpenBLAS_INCLUDE_DIR
  NAMES openblas_config.h
  PATH_SUFFIXES openblas-pthread openblas
  HINTS /usr/include/${CMAKE_LIBRARY_ARCHITECTURE}/openblas-pthread)
find_library(
  OpenBLAS_LIBRARY
  NAMES openblas openblasp
  PATH_SUFFIXES openblas-pthread
  HINTS /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE}/openblas-pthread)

if(OpenBLAS_INCLUDE_DIR AND EXISTS "${OpenBLAS_INCLUDE_DIR}/openblas_config.h")
  file(STRINGS "${OpenBLAS_INCLUDE_DIR}/openblas_config.h" _openblas_version REGEX "OPENBLAS_VERSION")
  if(_openblas_version MATCHES "([0-9]+\\.[0-9]+\\.[0-9]+)")
    set(OpenBLAS_VERSION "${CMAKE_MATCH_1}")
  endif()
  unset(_openblas_version)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  OpenBLAS
  REQUIRED_VARS OpenBLAS_LIBRARY OpenBLAS_INCLUDE_DIR
  VERSION_VAR OpenBLAS_VERSION
  REASON_FAILURE_MESSAGE "on Debian and Ubuntu: apt-get install libopenblas-pthread-dev")

if(OpenBLAS_FOUND AND NOT TARGET OpenBLAS::OpenBLAS)
  add_library(OpenBLAS::OpenBLAS UNKNOWN IMPORTED)
  set_target_properties(
    OpenBLAS::OpenBLAS
    PROPERTIES IMPORTED_LOCATION "${OpenBLAS_LIBRARY}"
               INTERFACE_INCLUDE_DIRECTORIES "${OpenBLAS_INCLUDE_DIR}")
endif()
mark_as_advanced(OpenBLAS_INCLUDE_DIR OpenBLAS_LIBRARY)
